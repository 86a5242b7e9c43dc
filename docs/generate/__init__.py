"""Writes the pages, tables and figures that come from records, the catalogue and the commands."""
