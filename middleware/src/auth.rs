//! Password authentication, for both ends: SCRAM-SHA-256 (RFC 5802, 7677), and MySQL's two methods.

use std::borrow::Cow;
use std::num::NonZeroU32;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::rand::SecureRandom as _;
use ring::{digest, hmac, pbkdf2, rand};
use subtle::ConstantTimeEq as _;

/// PostgreSQL's own number of iterations.
const ITERATIONS: NonZeroU32 = NonZeroU32::MIN.saturating_add(4095);

/// A unique random name of 32 digits.
pub(crate) fn random_name() -> String {
    random_bytes::<32>().iter().map(|byte| format!("{:x}", byte & 15)).collect()
}

/// Unpredictable random bytes without zeros: MySQL's nonces end at a zero.
pub(crate) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    if rand::SystemRandom::new().fill(&mut bytes).is_err() {
        // Without randomness no password is safe.
        std::process::abort();
    }
    bytes.map(|byte| byte % 94 + 33)
}

fn mac(key: &[u8], text: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text).as_ref().to_vec()
}

fn sha256(bytes: &[u8]) -> Vec<u8> {
    digest::digest(&digest::SHA256, bytes).as_ref().to_vec()
}

fn sha1(bytes: &[u8]) -> Vec<u8> {
    digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, bytes).as_ref().to_vec()
}

fn xor(left: &[u8], right: &[u8]) -> Vec<u8> {
    left.iter().zip(right).map(|(left, right)| left ^ right).collect()
}

/// The password as PostgreSQL's clients and servers normalize it, so that different encodings of
/// one text are one password (SASLprep, RFC 4013). A password that cannot be normalized is used as
/// it is.
fn prepared(password: &str) -> Cow<'_, str> {
    stringprep::saslprep(password).unwrap_or(Cow::Borrowed(password))
}

fn salted(password: &str, salt: &[u8], iterations: NonZeroU32) -> [u8; 32] {
    let (password, mut out) = (prepared(password), [0; 32]);
    pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, iterations, salt, password.as_bytes(), &mut out);
    out
}

/// The fields of a SCRAM message: `r=…,s=…`.
fn field(message: &str, name: char) -> Option<&str> {
    message.split(',').find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
}

/// SCRAM at the client.
pub(crate) struct ScramClient {
    password: String,
    bare: String,
    nonce: String,
    expected: Vec<u8>,
}

impl ScramClient {
    pub(crate) fn new(password: &str) -> (Self, String) {
        let nonce = BASE64.encode(random_bytes::<18>());
        let bare = format!("n=,r={nonce}");
        let first = format!("n,,{bare}");
        (Self { password: password.into(), bare, nonce, expected: Vec::new() }, first)
    }

    /// The answer to the server's first message.
    pub(crate) fn answer(&mut self, server: &str) -> Option<String> {
        let nonce = field(server, 'r')?;
        let salt = BASE64.decode(field(server, 's')?).ok()?;
        let iterations = NonZeroU32::new(field(server, 'i')?.parse().ok()?)?;
        if !nonce.starts_with(&self.nonce) || iterations.get() > 1_000_000 {
            return None;
        }
        let salted = salted(&self.password, &salt, iterations);
        let client = mac(&salted, b"Client Key");
        let bare = format!("c=biws,r={nonce}");
        let all = format!("{},{server},{bare}", self.bare);
        let proof = xor(&client, &mac(&sha256(&client), all.as_bytes()));
        self.expected = mac(&mac(&salted, b"Server Key"), all.as_bytes());
        Some(format!("{bare},p={}", BASE64.encode(&proof)))
    }

    /// Whether the server has proved that it knows the password.
    pub(crate) fn is_server(&self, last: &str) -> bool {
        let given = field(last, 'v').and_then(|mark| BASE64.decode(mark).ok()).unwrap_or_default();
        given.ct_eq(&self.expected).into()
    }
}

/// SCRAM at a server that knows the password.
pub(crate) struct ScramServer {
    password: Option<String>,
    bare: String,
    header: String,
    first: String,
    nonce: String,
    salt: [u8; 16],
}

impl ScramServer {
    /// Starts with the client's first message. Without a password, authentication fails after the
    /// same computation.
    pub(crate) fn new(password: Option<&str>, client: &str) -> Option<(Self, String)> {
        let bare = client.splitn(3, ',').nth(2)?.to_owned();
        let header = client.get(..client.len() - bare.len())?.to_owned();
        if !header.starts_with(['n', 'y']) {
            return None;
        }
        let nonce = format!("{}{}", field(&bare, 'r')?, BASE64.encode(random_bytes::<18>()));
        let salt = random_bytes::<16>();
        let first = format!("r={nonce},s={},i={ITERATIONS}", BASE64.encode(salt));
        let server = Self {
            password: password.map(str::to_owned),
            bare,
            header,
            first: first.clone(),
            nonce,
            salt,
        };
        Some((server, first))
    }

    /// The server's last message, if the proof is right.
    pub(crate) fn check(&self, client: &str) -> Option<String> {
        let salted = salted(self.password.as_deref().unwrap_or(""), &self.salt, ITERATIONS);
        let (bare, proof) = client.rsplit_once(",p=")?;
        let all = format!("{},{},{bare}", self.bare, self.first);
        let client_key = mac(&salted, b"Client Key");
        let expected = xor(&client_key, &mac(&sha256(&client_key), all.as_bytes()));
        let is_right: bool = BASE64.decode(proof).ok()?.ct_eq(&expected).into();
        let is_ours = field(bare, 'r') == Some(self.nonce.as_str())
            && field(bare, 'c') == Some(BASE64.encode(self.header.as_bytes()).as_str());
        let signature = mac(&mac(&salted, b"Server Key"), all.as_bytes());
        (is_right && is_ours && self.password.is_some())
            .then(|| format!("v={}", BASE64.encode(&signature)))
    }
}

/// `mysql_native_password`: the client's response.
pub(crate) fn native(password: &str, nonce: &[u8]) -> Vec<u8> {
    if password.is_empty() {
        return Vec::new();
    }
    let stage = sha1(password.as_bytes());
    let mut seed = nonce.to_vec();
    seed.extend(sha1(&stage));
    xor(&stage, &sha1(&seed))
}

/// `caching_sha2_password`: the client's first response.
pub(crate) fn caching_sha2(password: &str, nonce: &[u8]) -> Vec<u8> {
    if password.is_empty() {
        return Vec::new();
    }
    let stage = sha256(password.as_bytes());
    let mut seed = sha256(&stage);
    seed.extend(nonce);
    xor(&stage, &sha256(&seed))
}

/// Compares two proofs in constant time.
pub(crate) fn is_same(left: &[u8], right: &[u8]) -> bool {
    left.ct_eq(right).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_of_scram_agree_and_a_wrong_password_fails() {
        for (known, given, is_in) in
            [(Some("secret"), "secret", true), (Some("secret"), "Secret", false), (None, "", false)]
        {
            let (mut client, first) = ScramClient::new(given);
            let (server, challenge) = ScramServer::new(known, &first).unwrap();
            let answer = client.answer(&challenge).unwrap();
            let last = server.check(&answer);
            assert_eq!(last.is_some(), is_in);
            if let Some(last) = last {
                assert!(client.is_server(&last) && !client.is_server("v=AAAA"));
            }
        }
        assert!(ScramServer::new(Some("x"), "p=tls-unique,,n=,r=abc").is_none());
        assert!(ScramServer::new(Some("x"), "").is_none());
    }

    /// The first two are examples of RFC 4013; the last has a character that SASLprep prohibits.
    #[test]
    fn passwords_are_the_same_in_every_spelling() {
        let client = |password: &str| salted(password, b"salt", ITERATIONS);
        assert_eq!(client("I\u{ad}X"), client("IX"));
        assert_eq!(client("\u{2168}"), client("IX"));
        assert_eq!(client("e\u{301}"), client("\u{e9}"));
        assert_eq!(prepared("\u{7}"), "\u{7}");
        assert_ne!(client("ix"), client("IX"));
    }

    /// The expected values are from MariaDB's `PASSWORD()` and from MySQL's documentation.
    #[test]
    fn scrambles_are_those_of_mysql() {
        let nonce = [1_u8; 20];
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(hex(&sha1(&sha1(b"root"))), "81f5e21e35407d884a6cd4a731aebfb6af209e1b");
        assert_eq!(native("root", &nonce).len(), 20);
        assert_eq!(caching_sha2("root", &nonce).len(), 32);
        assert!(native("", &nonce).is_empty());
    }
}
