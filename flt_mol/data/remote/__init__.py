"""Data sets from where they are published: fetched, checked and unpacked."""
