//! How long gateways, coordinators and participants wait, and how far leaders reserve timestamps.

use orthodrome_core::rng::Rng;
use orthodrome_core::time::Duration;

use crate::hosting::vary;

/// Time-outs that protocols which commit in two phases share.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Timeouts {
    /// A client sends an unanswered request again after this time, then after twice, …
    pub resend_after: Duration,
    /// Clients send heartbeats this often while they wait for locks or for their callers
    /// (Carousel §4.3.1).
    pub heartbeat_interval: Duration,
    /// A coordinator aborts a transaction whose client sends no heartbeat for this time (Carousel
    /// §4.3.1: `h` of them). With two-phase locking it aborts one whose votes do not arrive in
    /// this time, and a participant frees the locks of one that is not prepared.
    pub abandon_after: Duration,
    /// A participant asks about a transaction this long after it was prepared, and a coordinator
    /// about a vote or an acknowledgement this long after it asked; then again as often.
    pub query_after: Duration,
    /// How often a leader looks for work that is overdue.
    pub sweep_interval: Duration,
    /// How far ahead of its clock a leader reserves timestamps (R8).
    pub ceiling_ahead: Duration,
    /// Outcomes are kept this long for a client that has stopped acknowledging them.
    pub retention: Duration,
}

impl Timeouts {
    /// What suits a cluster whose longest round trip this is.
    pub(crate) fn for_round_trip(round_trip: Duration) -> Self {
        Self {
            resend_after: round_trip * 3 + Duration::from_millis(200),
            heartbeat_interval: Duration::from_secs(1),
            abandon_after: Duration::from_secs(5),
            query_after: round_trip * 5 + Duration::from_millis(500),
            sweep_interval: Duration::from_millis(200),
            ceiling_ahead: Duration::from_secs(1),
            retention: Duration::from_secs(600),
        }
    }

    /// Draws other time-outs, for the swarm.
    pub(crate) fn vary(&mut self, rng: &mut Rng) {
        // A fourth of `resend_after` is less than a round trip: every request is sent repeatedly.
        let (low, high) = if rng.chance(1, 2) { (1, 20) } else { (20, 150) };
        self.resend_after = vary(self.resend_after, low, high, rng);
        self.query_after = vary(self.query_after, 20, 150, rng);
        self.sweep_interval = vary(self.sweep_interval, 10, 150, rng);
        self.ceiling_ahead = vary(self.ceiling_ahead, 25, 200, rng);
        self.heartbeat_interval = vary(self.heartbeat_interval, 20, 100, rng);
    }
}
