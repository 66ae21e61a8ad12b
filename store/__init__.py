"""The store: Zarr arrays that are the record, and a DuckDB catalogue made from them."""
