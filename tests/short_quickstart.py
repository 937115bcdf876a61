"""Settings with which the main job takes seconds."""

TINY = """
training.stages={zero_out: {length: 2 steps}, retrofit: {length: 4 steps}, solidify: {length: 2 steps}}
training.sequence_length=64
training.batch_size=2
training.micro_batch_size=2
training.validation_sequences=8
training.calibration_sequences=4
training.checkpoint_every_steps=1
training.log_every_steps=1
""".strip().splitlines()
FACTS = ["data.facts.keys=2", "data.facts.num_keys=5"]
RETROFIT = [*TINY, *FACTS, "compression.delay=8", "training.sensitivity_init.sequences=2"]
LESSONS = "data.facts.lessons=[{kind: copies, length: 32, sequences: 2}]"
BASE = ["training.stages.pretrain.length=3 steps", *TINY[1:], *FACTS, LESSONS]
