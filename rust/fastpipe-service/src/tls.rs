//! Certificates of servers and clients.

use std::sync::Arc;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// A server's certificates and keys, as PEM.
pub struct ServerFiles {
    /// The server's certificate and its intermediate certificates.
    pub chain: Vec<u8>,
    /// The private key of the server's certificate.
    pub key: Vec<u8>,
    /// CA certificates that client certificates must be signed by; `None` if clients need no certificate.
    pub client_ca: Option<Vec<u8>>,
}

/// A client's certificates and keys, as PEM.
#[derive(Clone, Default)]
pub struct ClientFiles {
    /// CA certificates that the server's certificate must be signed by; `None` for the system's.
    pub ca: Option<Vec<u8>>,
    /// The client's certificate with its intermediate certificates, and its private key.
    pub certificate: Option<(Vec<u8>, Vec<u8>)>,
}

/// The protocol for the TLS handshake: gRPC requires HTTP/2.
fn protocols() -> Vec<Vec<u8>> {
    vec![b"h2".to_vec()]
}

/// Parses the certificates of a PEM file.
///
/// # Errors
/// If the file contains no certificate, or one can't be read.
fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if found.is_empty() => Err("it contains no certificate".to_owned()),
        found => found.map_err(|error| error.to_string()),
    }
}

/// Parses the CA certificates of a PEM file.
///
/// # Errors
/// If the file contains no certificate, or one can't be read.
fn roots(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(pem)? {
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    Ok(roots)
}

/// Creates a server's TLS configuration.
///
/// # Errors
/// If a file can't be read, or the key doesn't match the certificate. The text says which.
pub fn server_config(files: &ServerFiles) -> Result<Arc<ServerConfig>, String> {
    let provider = Arc::new(default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(pem) => {
            let roots = Arc::new(roots(pem).map_err(|error| format!("client_ca: {error}"))?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| format!("client_ca: {error}"))?)
        }
    };
    let chain = certificates(&files.chain).map_err(|error| format!("the certificate chain: {error}"))?;
    let key = PrivateKeyDer::from_pem_slice(&files.key).map_err(|error| format!("the private key: {error}"))?;
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|error| format!("the certificate and its key: {error}"))?;
    config.alpn_protocols = protocols();
    Ok(Arc::new(config))
}

/// Creates a client's TLS configuration.
///
/// # Errors
/// If a file can't be read, or the key doesn't match the certificate. The text says which.
pub fn client_config(files: &ClientFiles) -> Result<Arc<ClientConfig>, String> {
    let roots = match &files.ca {
        Some(pem) => roots(pem).map_err(|error| format!("ca: {error}"))?,
        None => {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            roots
        }
    };
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let mut config = match &files.certificate {
        None => config.with_no_client_auth(),
        Some((chain, key)) => {
            let chain = certificates(chain).map_err(|error| format!("the certificate: {error}"))?;
            let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("the private key: {error}"))?;
            let config = config.with_client_auth_cert(chain, key);
            config.map_err(|error| format!("the certificate and its key: {error}"))?
        }
    };
    config.alpn_protocols = protocols();
    Ok(Arc::new(config))
}
