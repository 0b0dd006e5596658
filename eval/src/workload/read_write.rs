//! Any workload with its read-only transactions put to the database like all others.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Kind, Reads, Writes};

use super::{Issuer, Request, Step, Values, Workload};

/// The workload inside, except that what only reads is an interactive transaction that writes
/// nothing: every partition that it reads prepares it, and it commits like any other.
#[derive(Debug)]
pub(super) struct ReadWrite(pub Box<dyn Workload>);

impl Workload for ReadWrite {
    fn name(&self) -> String {
        self.0.name()
    }

    fn values(&self) -> Values {
        self.0.values()
    }

    fn place(&mut self, cluster: &Cluster) {
        self.0.place(cluster);
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        let mut request = self.0.next(issuer, rng);
        if request.kind == Kind::ReadOnly {
            request.kind = Kind::Interactive;
        }
        request
    }

    fn decide(&self, request: &Request, reads: &Reads) -> Decision {
        if request.writes.is_empty() {
            return Decision::Commit(Writes::new());
        }
        self.0.decide(request, reads)
    }

    fn step(&self, request: &Request, reads: &Reads) -> Step {
        self.0.step(request, reads)
    }

    fn is_general(&self) -> bool {
        self.0.is_general()
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        self.0.audit(request, reads)
    }

    fn final_requests(&self) -> Vec<Request> {
        self.0.final_requests()
    }

    fn audit_end(&self, reads: &Reads) -> Result<(), String> {
        self.0.audit_end(reads)
    }
}
