"""lm-eval's own command line, to which compressed models are known.

`python -m dmc.lm_eval --model hf --model_args pretrained=DIR --tasks piqa` and all its other options.
"""

from __future__ import annotations

import dmc.models  # noqa: F401  (registers compressed models with the Auto* classes)


def main() -> None:
    """Run lm-eval with this process's arguments."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
