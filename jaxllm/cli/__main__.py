"""Make `python -m jaxllm.cli` run the command `jaxllm`."""

import sys

from jaxllm.cli.main import main

sys.exit(main())
