from toolkit.process.policies import set_policies

set_policies()  # as the command line does
