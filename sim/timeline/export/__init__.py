"""Timelines in the formats that people's viewers open: tables (Parquet), traces (Chrome, Kineto)."""
