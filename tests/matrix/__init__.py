"""Both faces on other releases of LMCache and other Pythons: ``make test-matrix``.

===================  ==================================================================
room                 what lives there
===================  ==================================================================
``__main__.py``      which cells, and in what order
``environments.py``  Pythons, what is installed for each, LMCache laid over it; cached
``cell.py``          one run of the tests in one environment, and its counts
``table.py``         the table of ``docs/compatibility.md``
===================  ==================================================================
"""
