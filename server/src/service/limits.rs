//! Bounds on requests of clients.

use std::time::Duration;

use super::api;

/// Maximum of `keys_max` and `ops_max`. A message with more fields than a transaction of that size
/// needs is refused before it is decoded; see [`super::codec`].
pub(super) const PARTS_MAX: u32 = 10_000;

/// Bounds on requests and on the state that is kept for clients.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Maximum length of a key, in bytes; the minimum is 1.
    pub key_bytes_max: u32,
    /// Maximum length of a value, in bytes.
    pub value_bytes_max: u32,
    /// Maximum number of distinct keys of one transaction.
    pub keys_max: u32,
    /// Maximum number of operations of one procedure.
    pub ops_max: u32,
    /// Maximum size of an encoded request, in bytes.
    pub request_bytes_max: u32,
    /// Maximum number of bytes of values in one answer.
    pub response_bytes_max: u32,
    /// Time that an interactive transaction stays open without a message of its client.
    pub lease: Duration,
    /// Maximum number of open interactive transactions.
    pub txns_open_max: usize,
    /// Maximum number of connections.
    pub connections_max: usize,
    /// Maximum number of requests in progress.
    pub requests_max: usize,
    /// Maximum number of bytes of requests in progress, including those that began a transaction
    /// that is still open or in flight. It bounds the memory that clients can make a gateway use,
    /// up to a small factor. It is applied twice: to requests on arrival, and to transactions in
    /// flight, which may last longer than the requests that began them.
    pub request_bytes_in_flight_max: usize,
    /// Time limit of one request, including the arrival of its body. The transaction of a request
    /// that is cut off here continues; its client calls `Resolve`.
    pub request_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            key_bytes_max: 4 << 10,
            value_bytes_max: 1 << 20,
            keys_max: 1_000,
            ops_max: 1_000,
            request_bytes_max: 4 << 20,
            response_bytes_max: 16 << 20,
            lease: Duration::from_secs(10),
            txns_open_max: 10_000,
            connections_max: 10_000,
            requests_max: 10_000,
            request_bytes_in_flight_max: 64 << 20,
            request_timeout: Duration::from_secs(60),
        }
    }
}

/// A limit is out of range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("limits.{field}: {value} is out of range; it must be {wanted}")]
pub struct LimitsError {
    field: &'static str,
    value: u64,
    wanted: String,
}

/// The largest bound on what a node has at the same time: a semaphore takes no more.
const PLACES_MAX: usize = tokio::sync::Semaphore::MAX_PERMITS;

impl Limits {
    /// Checks that the limits are consistent.
    ///
    /// # Errors
    /// The first field that is out of range, and the range.
    pub fn check(&self) -> Result<(), LimitsError> {
        let at_least = |field, value: u64, least: u64| {
            if value < least {
                return Err(LimitsError { field, value, wanted: format!("at least {least}") });
            }
            Ok(())
        };
        at_least("key_bytes_max", self.key_bytes_max.into(), 1)?;
        at_least("keys_max", self.keys_max.into(), 1)?;
        at_least("ops_max", self.ops_max.into(), 1)?;
        for (field, value) in [("keys_max", self.keys_max), ("ops_max", self.ops_max)] {
            if value > PARTS_MAX {
                let wanted = format!("at most {PARTS_MAX}");
                return Err(LimitsError { field, value: value.into(), wanted });
            }
        }
        at_least("txns_open_max", self.txns_open_max as u64, 1)?;
        at_least("connections_max", self.connections_max as u64, 1)?;
        at_least("requests_max", self.requests_max as u64, 1)?;
        for (field, value) in [
            ("connections_max", self.connections_max),
            ("requests_max", self.requests_max),
            ("request_bytes_in_flight_max", self.request_bytes_in_flight_max),
        ] {
            if value > PLACES_MAX {
                let wanted = format!("at most {PLACES_MAX}");
                return Err(LimitsError { field, value: value as u64, wanted });
            }
        }
        // A request must have room for one key with its value and the other fields.
        let one = u64::from(self.key_bytes_max) + u64::from(self.value_bytes_max) + 1_024;
        at_least("request_bytes_max", self.request_bytes_max.into(), one)?;
        at_least("response_bytes_max", self.response_bytes_max.into(), one)?;
        let request = self.request_bytes_max.into();
        at_least("request_bytes_in_flight_max", self.request_bytes_in_flight_max as u64, request)?;
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        at_least("lease_ms", millis(self.lease), 10)?;
        at_least("request_timeout_ms", millis(self.request_timeout), 10)?;
        // `Limits.lease_ms` is 32 bits wide.
        if millis(self.lease) > u64::from(u32::MAX) {
            let wanted = format!("at most {}", u32::MAX);
            return Err(LimitsError { field: "lease_ms", value: millis(self.lease), wanted });
        }
        Ok(())
    }

    /// The part of the limits that clients need.
    pub(super) fn to_api(&self) -> api::Limits {
        api::Limits {
            key_bytes_max: self.key_bytes_max,
            value_bytes_max: self.value_bytes_max,
            keys_max: self.keys_max,
            ops_max: self.ops_max,
            request_bytes_max: self.request_bytes_max,
            response_bytes_max: self.response_bytes_max,
            lease_ms: u32::try_from(self.lease.as_millis()).unwrap_or(u32::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_contradict_each_other_are_refused_by_name() {
        assert_eq!(Limits::default().check(), Ok(()));
        type Change = fn(&mut Limits);
        let broken: [(&str, Change); 6] = [
            ("key_bytes_max", |limits| limits.key_bytes_max = 0),
            ("request_bytes_max", |limits| limits.value_bytes_max = 4 << 20),
            ("request_bytes_in_flight_max", |limits| limits.request_bytes_in_flight_max = 1),
            ("connections_max", |limits| limits.connections_max = usize::MAX),
            ("lease", |limits| limits.lease = Duration::ZERO),
            ("lease", |limits| limits.lease = Duration::from_secs(1 << 40)),
        ];
        for (field, change) in broken {
            let mut limits = Limits::default();
            change(&mut limits);
            let message = limits.check().unwrap_err().to_string();
            assert!(message.contains(field), "{message:?} does not name {field}");
        }
    }
}
