"""What a change of the code must leave as it is: numbers of recipes, the interface, outputs of commands, speed."""
