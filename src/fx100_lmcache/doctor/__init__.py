"""Would this configuration really work? Every finding: what, why it matters, what to type.

====================  =========================================================================
room                  what lives there
====================  =========================================================================
``question.py``       what is asked. Pure
``versions.py``       LMCache and vLLM: which are supported, which are installed
``documents.py``      LMCache's and vLLM's files -> settings
``loading.py``        whether LMCache would find our classes, tried in another process
``import_probe.py``   what runs in that process
``ours.py``           what our own YAML says about space and names. Pure
``volume.py``         members, labels and claims. Pure
``proof.py``          direct I/O: a write and a read where the format keeps nothing
``engine.py``         the native engine
``sizes.py``          host memory and volume against sessions. Pure
``inprocess.py``      LMCache's settings inside vLLM. Pure
``mp.py``             the adapter of LMCache's server. Pure
``nvme.py``           controllers and namespaces of this volume; lost paths. Pure
====================  =========================================================================

LMCache only logs why a plugin did not start and goes on without it, so nothing else tells.
"""
