"""Layers that join other libraries, one module for each: import what you use."""
