"""The engine core: scheduler, runner, sampler; one process per tensor-parallel rank."""
