//! Replicas of one partition compare what they came to.

use orthodrome_protocols::carousel::{self, BASIC, Carousel, FAST};
use orthodrome_protocols::natto::{self, Natto, RECSF};
use orthodrome_protocols::two_phase_locking::{self, BY_AGE, Locking};
use orthodrome_sim::FailureKind;

use super::support::first_failure;

/// The first server skips some entries. It finds that its digests differ from the leader's, and
/// stops.
#[test]
fn a_replica_that_skips_entries_stops() {
    const WHY: &str = "came to different results";
    fn skip(hosting: &mut carousel::HostingConfig) {
        hosting.skips_entries = true;
        hosting.replication.compared_entries = 4;
    }
    for name in [BASIC, FAST] {
        let settings = |config: &mut carousel::Config| skip(&mut config.hosting);
        first_failure::<Carousel>(name, FailureKind::Panic, WHY, settings);
    }
    let settings = |config: &mut natto::Config| skip(&mut config.hosting);
    first_failure::<Natto>(RECSF, FailureKind::Panic, WHY, settings);
    let settings = |config: &mut two_phase_locking::Config| skip(&mut config.hosting);
    first_failure::<Locking>(BY_AGE, FailureKind::Panic, WHY, settings);
}
