"""The compiled engine for CPUs: `cpu.cpp`, what builds and loads it, and its operators."""
