from residual_mass.cli import main

main()
