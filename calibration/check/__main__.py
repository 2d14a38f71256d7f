from calibration.check.command import main

raise SystemExit(main())
