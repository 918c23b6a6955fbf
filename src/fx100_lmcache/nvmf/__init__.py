"""NVMe-over-Fabrics: run nvme-cli, read sysfs, connect, and find a namespace's device node.

=================  ============================================================================
room               what lives there
=================  ============================================================================
``identity.py``    what a namespace *is*: NQN, NSID, NGUID, EUI-64, UUID. Pure
``address.py``     where a controller is reached. Pure
``snapshot.py``    what the kernel knows of NVMe, as plain values. Pure
``sysfs.py``       sysfs -> snapshot; writing a controller's time-outs
``resolve.py``     identity -> device node, or an error that says what was seen
``parse.py``       JSON of nvme-cli 1.13 to 3.x -> plain values. Pure
``causes.py``      exit code and text of a failed command -> typed error. Pure
``runner.py``      the ``nvme`` program as a subprocess with a deadline
``fabrics.py``     connecting with a secret, which nvme-cli would put on its command line
``plan.py``        what has to be done to be connected as wanted. Pure
``connect.py``     doing it, twice with the same result
``reconnect.py``   connecting lost paths again, by a process that has members there
``preflight.py``   whether this process could
``discover.py``    what each configured address offers to this host
``scope.py``       what of all that is connected is the volume's. Pure
``check.py``       whether what is there suits the job, why it matters, what to type. Pure
=================  ============================================================================
"""
