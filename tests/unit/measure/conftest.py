from tests.unit.benchmarks.conftest import backbone_spec, benchmark_assets, error_line, phi, prompts_spec  # noqa: F401
