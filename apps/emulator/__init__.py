"""A cluster on one machine: hosts in network namespaces, joined by links of a chosen speed."""
