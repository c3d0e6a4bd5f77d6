"""Recurrent layers, and the scans that compute them."""
