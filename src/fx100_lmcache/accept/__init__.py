"""The acceptance kit: four gates that buyer and vendor run together, each with a report.

A gate is a list of steps (`steps.py`). Each step measures, or has a known tool measure, and judges
what it found by the criteria (`criteria.py`). What a step lacks it says by name, and a gate with
such a step is incomplete, never passed.
"""
