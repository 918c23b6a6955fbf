"""LMCache as we use it: what differs between its releases, and nothing else.

No other file imports LMCache. Each of these is imported only by what needs it, since a release may
have one face's names and not the other's.

=================  =======================================================================
room               what lives there
=================  =======================================================================
``memory.py``      memory objects; the same in all releases
``mp.py``          names for the adapter of ``lmcache server``
``inprocess.py``   names for the plugin of the vLLM workers
``contract.py``    whether a release has what ours implements and calls
``release.py``     an error that says which release to install
=================  =======================================================================
"""
