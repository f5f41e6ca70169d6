# The base class alone: torchtitan is not there where types are checked.
