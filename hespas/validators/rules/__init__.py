"""The rules by family. The table that names them all is :mod:`hespas.validators.table`."""
