"""Fuzzing of every decoder and reader: bytes that no rank, program or user would send, write or type.

``python -m apps.fuzz --all --runs 1e5``; see docs/fuzzing.md. Coverage guides the inputs where atheris is installed
(``make fuzz``); otherwise they are mutations of the targets' seeds, drawn from ``--seed``.
"""
