"""`python -m jaxllm.cli` is the command `jaxllm`."""

import sys

from jaxllm.cli.main import main

sys.exit(main())
