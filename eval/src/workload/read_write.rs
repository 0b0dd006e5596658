//! Any workload, with its read-only transactions submitted as another kind.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Kind, Reads, Writes};

use super::{Issuer, ReadOnlyAs, Request, Step, Values, Workload};

/// The inner workload, with one difference. Its read-only transactions become interactive
/// transactions without writes, which prepare and commit at every partition that they read; or they
/// become stale reads. Scans and final requests do not change.
#[derive(Debug)]
pub(super) struct ReadAs {
    pub workload: Box<dyn Workload>,
    pub how: ReadOnlyAs,
}

impl Workload for ReadAs {
    fn name(&self) -> String {
        self.workload.name()
    }

    fn values(&self) -> Values {
        self.workload.values()
    }

    fn place(&mut self, cluster: &Cluster) {
        self.workload.place(cluster);
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        let mut request = self.workload.next(issuer, rng);
        if request.kind == Kind::ReadOnly && request.scan.is_none() {
            request.kind = match self.how {
                ReadOnlyAs::ReadOnly => Kind::ReadOnly,
                ReadOnlyAs::ReadWrite => Kind::Interactive,
                ReadOnlyAs::Stale => Kind::StaleReadOnly,
            };
        }
        request
    }

    fn decide(&self, request: &Request, reads: &Reads) -> Decision {
        if request.writes.is_empty() {
            return Decision::Commit(Writes::new());
        }
        self.workload.decide(request, reads)
    }

    fn step(&self, request: &Request, reads: &Reads) -> Step {
        self.workload.step(request, reads)
    }

    fn is_general(&self) -> bool {
        self.workload.is_general()
    }

    fn has_scans(&self) -> bool {
        self.workload.has_scans()
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        self.workload.audit(request, reads)
    }

    fn final_requests(&self) -> Vec<Request> {
        self.workload.final_requests()
    }

    fn audit_end(&self, reads: &Reads) -> Result<(), String> {
        self.workload.audit_end(reads)
    }
}
