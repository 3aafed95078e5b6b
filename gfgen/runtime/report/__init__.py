"""Traces and charts."""
