"""What vLLM makes of its arguments, asked in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

VLLM_PARSER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser, found = make_arg_parser(FlexibleArgumentParser()), []
for arguments in json.loads(sys.argv[1]):
    args = parser.parse_args(["--model", "m", *arguments])
    validate_parsed_serve_args(args)
    transfer = args.kv_transfer_config
    found.append([args.host, args.port, transfer.kv_connector, transfer.kv_role,
                  transfer.kv_load_failure_policy, transfer.kv_connector_extra_config])
print(json.dumps(found))
"""


def run_python(code: str, argument: str) -> list[Any]:
    """Run `code` in a process of its own; return the JSON list that its last line holds."""
    command = [sys.executable, "-c", code, argument]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found: list[Any] = json.loads(result.stdout.splitlines()[-1])
    return found
