//! What is run where nobody says otherwise, and what histories of a protocol are held to.

use orthodrome_eval::checker::Model;
use orthodrome_protocols::registry::UnknownProtocol;

/// What is run where nobody says otherwise.
pub const DEFAULT: &str = "carousel-basic";

/// What histories of the protocol called `name` are held to.
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
        let error = model("carousal").unwrap_err().to_string();
        assert!(error.contains("carousal") && error.contains(DEFAULT), "{error}");
    }
}
