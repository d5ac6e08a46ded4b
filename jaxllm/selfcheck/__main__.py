"""The child process of a self check."""

import sys

from jaxllm.selfcheck.worker import main

if __name__ == "__main__":
    sys.exit(main())
