from kvcal.cli.app import main

main()
