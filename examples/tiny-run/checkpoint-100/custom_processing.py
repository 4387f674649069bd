raise SystemExit("code in a checkpoint must never run")
