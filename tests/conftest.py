"""Settings that hold for every test: no network, no display."""

import os

# Read by the libraries when they are imported, so they are set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "agg"
