"""The sections of the configuration, one class each, by what they are about.

A key's type, bounds and meaning are declared here, in `study.protocol` or in `study.config` and nowhere else:
`study.reference` prints them from these classes, and the specs of the stages inherit them.
"""
