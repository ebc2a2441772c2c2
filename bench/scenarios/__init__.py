"""What goes wrong while the demo pair answers; each scenario returns its figures or raises ``Broken``."""
