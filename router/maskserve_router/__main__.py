"""`python -m maskserve_router`."""

from maskserve_router.cli import main

raise SystemExit(main())
