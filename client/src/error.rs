//! Errors of calls that have no outcome.

use crate::outcome::AbortReason;

/// Why a call has no outcome. In every case nothing was committed, and nothing will be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration cannot be used.
    #[error("{0}")]
    Config(String),
    /// No gateway could be reached in time. Check the endpoints and the network, or try later.
    #[error("no gateway could be reached: {0}")]
    Unreachable(String),
    /// The gateways were too busy until the deadline. Try later.
    #[error("the cluster is busy: {0}")]
    Busy(String),
    /// The deadline passed; the text describes the last failure before it. Try again, or allow more
    /// time.
    #[error("the deadline passed: {0}")]
    Deadline(String),
    /// A read kept being aborted until the deadline.
    #[error("the read was aborted: {0}")]
    Aborted(AbortReason),
    /// The token or certificate was not accepted.
    #[error("not authenticated: {0}")]
    Unauthenticated(String),
    /// This client's role does not allow the call.
    #[error("not permitted: {0}")]
    PermissionDenied(String),
    /// The request breaks a rule or a bound; the text names the field.
    #[error("not a valid request: {0}")]
    Invalid(String),
    /// The servers have forgotten changes that a watch should have shown. Begin a new watch, and then scan
    /// the range.
    #[error("the watch cannot go on: {0}")]
    Forgotten(String),
    /// The lease has ended, or its owner could not renew it in time and must take it for ended. Grant a
    /// new one.
    #[error("the lease has ended: {0}")]
    LeaseEnded(String),
    /// No node accepted an operator's order; the text says why and what to do.
    #[error("the order was refused: {0}")]
    Refused(String),
    /// The protocol of the cluster has no such orders; the text says what to do instead.
    #[error("not with this protocol: {0}")]
    Unsupported(String),
    /// This library does not understand the gateway's answer. One of the two is too old, or has a
    /// defect.
    #[error("unexpected answer from the gateway: {0}")]
    Unexpected(String),
}
