"""The sections of the configuration, one class each, by what they are about.

A key's type, bounds and meaning are declared here, in `study.protocol` or in `study.config` and nowhere else: the
editor's schemas and the tables of config/README.md are written from these classes (`study.reference`), and the specs of
the stages inherit them.
"""
