"""Any data set to another kind of file, so that nothing is lost on the way."""

from flt_mol.data.conversion.run import ConvertResult, Progress, convert

__all__ = ["ConvertResult", "Progress", "convert"]
