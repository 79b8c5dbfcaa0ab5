"""What a person runs: models, engine, compile pipeline, commands."""
