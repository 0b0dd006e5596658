//! The default protocol, and the guarantee that histories of a protocol are checked against.

use orthodrome_eval::checker::Model;
use orthodrome_protocols::registry::UnknownProtocol;

/// The default protocol.
pub const DEFAULT: &str = "geodesic";

/// The consistency model that histories of the protocol `name` are checked against.
///
/// # Errors
/// There is no such protocol.
pub fn model(name: &str) -> Result<Model, UnknownProtocol> {
    Ok(orthodrome_lab::find(name)?.model())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_protocol_has_a_model_and_the_default_is_one() {
        assert!(orthodrome_lab::rows().all(|row| model(row.name).is_ok()));
        assert!(model(DEFAULT).is_ok());
        let error = model("geodesik").unwrap_err().to_string();
        assert!(error.contains("geodesik") && error.contains(DEFAULT), "{error}");
    }
}
