//! Errors of stores as errors of fastpipe.

use std::error::Error as _;

use fastpipe_batch::{Error, ErrorKind};

/// Converts an error of a store. `secrets` never appear in the result.
pub(crate) fn converted(error: &object_store::Error, url: &str, secrets: &[String]) -> Error {
    use object_store::Error as E;
    let (kind, what) = match error {
        E::NotFound { .. } => (ErrorKind::NotFound, "there is no such object"),
        E::Precondition { .. } | E::NotModified { .. } => {
            return Error::new(ErrorKind::Storage, CHANGED).at_path(url);
        }
        E::PermissionDenied { .. } => (ErrorKind::Storage, "the store denies access"),
        E::Unauthenticated { .. } => (ErrorKind::Storage, "the store needs other credentials"),
        E::NotSupported { .. } | E::NotImplemented { .. } => (ErrorKind::Unsupported, "the store can't do this"),
        E::InvalidPath { .. } => (ErrorKind::Storage, "the URL isn't valid"),
        _ => (ErrorKind::Storage, "the store can't be read"),
    };
    let detail = match error {
        E::NotFound { .. } => String::new(),
        error => format!(": {}", redacted(&innermost(error), secrets)),
    };
    Error::new(kind, format!("{what}{detail}")).at_path(url)
}

/// The reason of an error for an object that was replaced.
pub(crate) const CHANGED: &str = "the file changed while it was read: its version is another one now";

/// Returns the text of an error and of its causes, without repetitions.
fn innermost(error: &object_store::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

/// Removes secrets and the queries of URLs, which may contain signatures.
fn redacted(text: &str, secrets: &[String]) -> String {
    let mut text = text.to_owned();
    for secret in secrets.iter().filter(|secret| !secret.is_empty()) {
        text = text.replace(secret, "***");
    }
    let mut clean = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(start) = rest.find("://") {
        let end = rest[start..]
            .find([' ', ')', '"', '\'', ','])
            .map_or(rest.len(), |end| start + end);
        let (url, tail) = rest.split_at(end);
        match url[start..].find('?') {
            Some(query) => {
                clean.push_str(&url[..start + query]);
                clean.push_str("?***");
            }
            None => clean.push_str(url),
        }
        rest = tail;
    }
    clean + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_queries_never_appear() {
        let text = "error for url (https://a.blob/c/x?sv=1&sig=abc%3D): key hunter22, see http://b/?q=1 and http://c/d";
        let found = redacted(text, &["hunter22".to_owned(), String::new()]);
        assert_eq!(
            found,
            "error for url (https://a.blob/c/x?***): key ***, see http://b/?*** and http://c/d"
        );
    }

    #[test]
    fn a_replaced_object_is_a_storage_error() {
        let source = "x".into();
        let error = object_store::Error::Precondition {
            path: "p".into(),
            source,
        };
        let error = converted(&error, "s3://b/p", &[]);
        assert_eq!((error.kind(), error.reason()), (ErrorKind::Storage, CHANGED));
        assert_eq!(error.location().path.as_deref(), Some("s3://b/p"));
    }
}
