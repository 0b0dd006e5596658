//! The time-outs of gateways, coordinators and participants, and how far ahead leaders reserve
//! timestamps.

use orthodrome_core::rng::Rng;
use orthodrome_core::time::Duration;

use crate::hosting::vary;

/// Time-outs shared by the protocols that commit in two phases.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Timeouts {
    /// A gateway sends an unanswered request again after this time, then after twice as long, and
    /// so on.
    pub resend_after: Duration,
    /// The interval of gateways' heartbeats while they wait for locks or for their clients
    /// (Carousel §4.3.1).
    pub heartbeat_interval: Duration,
    /// A coordinator aborts a transaction if its client's heartbeats are missing for this time
    /// (Carousel §4.3.1: `h` of them). With two-phase locking it also aborts a transaction whose
    /// votes do not arrive in this time, and a participant releases the locks of one that is not
    /// prepared.
    pub abandon_after: Duration,
    /// A participant asks about a prepared transaction after this time, and a coordinator about a
    /// missing vote or acknowledgement; then again at this interval.
    pub query_after: Duration,
    /// The interval at which a leader looks for overdue work.
    pub sweep_interval: Duration,
    /// How far ahead of its clock a leader reserves timestamps (R8).
    pub ceiling_ahead: Duration,
    /// How long outcomes are kept for a client that has stopped acknowledging them.
    pub retention: Duration,
}

impl Timeouts {
    /// Time-outs for a cluster with this longest round trip.
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
        // A quarter of `resend_after` is less than a round trip: every request is sent repeatedly.
        let (low, high) = if rng.chance(1, 2) { (1, 20) } else { (20, 150) };
        self.resend_after = vary(self.resend_after, low, high, rng);
        self.query_after = vary(self.query_after, 20, 150, rng);
        self.sweep_interval = vary(self.sweep_interval, 10, 150, rng);
        self.ceiling_ahead = vary(self.ceiling_ahead, 25, 200, rng);
        self.heartbeat_interval = vary(self.heartbeat_interval, 20, 100, rng);
    }
}
