from tests.unit.benchmarks.conftest import backbone_spec, benchmark_assets, phi, prompts_spec  # noqa: F401
