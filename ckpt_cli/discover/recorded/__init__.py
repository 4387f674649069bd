"""What a training noted of its model beside config.json."""
