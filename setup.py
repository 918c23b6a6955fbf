"""Builds the optional native lane; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "fx100_lmcache.engine._native",
            [f"src/fx100_lmcache/engine/{name}.c" for name in ("_native", "_pool")],
            depends=["src/fx100_lmcache/engine/_pool.h"],
            extra_compile_args=["-O2", "-pthread"],
            py_limited_api=True,
            optional=True,  # without a compiler the Python lane does the work
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
