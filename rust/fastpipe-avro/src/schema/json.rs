//! Parses a schema's JSON without attributes that reading doesn't need, such as documentation.
//!
//! Defaults are kept as text, because only a reader's schema needs them (Avro 1.12 specification, "Schema Resolution").
//! Some files have invalid defaults, which Java's reader doesn't check either. Other attributes are skipped without
//! recursion or allocation, however deep they are nested. The attributes that are kept take about ten times as much
//! memory as their text.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::limits::MAX_SCHEMA_JSON_LEVELS;

/// A JSON value that is part of a schema.
#[derive(Debug, PartialEq)]
pub(crate) enum Json {
    Text(String),
    Number(u64),
    List(Vec<Json>),
    Object(Object),
    /// The text of a default, which is parsed on demand.
    Default(Arc<str>),
    /// A value that can't be part of a schema: other numbers, booleans, null, and objects without relevant keys.
    Other,
}

/// The entries of an object that reading needs.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Object(Vec<(Key, Json)>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    Type,
    Name,
    Namespace,
    Fields,
    Symbols,
    Size,
    Items,
    Values,
    LogicalType,
    Precision,
    Scale,
    Aliases,
    Default,
}

impl Key {
    const ALL: [(&'static str, Key); 13] = [
        ("type", Key::Type),
        ("name", Key::Name),
        ("namespace", Key::Namespace),
        ("fields", Key::Fields),
        ("symbols", Key::Symbols),
        ("size", Key::Size),
        ("items", Key::Items),
        ("values", Key::Values),
        ("logicalType", Key::LogicalType),
        ("precision", Key::Precision),
        ("scale", Key::Scale),
        ("aliases", Key::Aliases),
        ("default", Key::Default),
    ];

    fn of(text: &str) -> Option<Key> {
        Key::ALL.iter().find(|(name, _)| *name == text).map(|(_, key)| *key)
    }
}

impl Json {
    /// Parses a schema's JSON.
    pub(crate) fn parse(text: &str) -> Result<Json, Error> {
        let too_deep = Cell::new(false);
        let seed = Part {
            level: 0,
            too_deep: &too_deep,
        };
        let mut deserializer = serde_json::Deserializer::from_str(text);
        // The visitor below counts the levels itself.
        deserializer.disable_recursion_limit();
        let parsed = seed.deserialize(&mut deserializer).and_then(|json| {
            deserializer.end()?;
            Ok(json)
        });
        parsed.map_err(|error| {
            if too_deep.get() {
                let reason =
                    format!("the schema's JSON is nested deeper than {MAX_SCHEMA_JSON_LEVELS} levels, the limit");
                return Error::new(ErrorKind::Limit, reason);
            }
            Error::new(ErrorKind::Schema, format!("expected an Avro schema: {error}"))
        })
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Json::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl Object {
    pub(crate) fn get(&self, key: Key) -> Option<&Json> {
        self.0.iter().find(|(k, _)| *k == key).map(|(_, value)| value)
    }

    pub(crate) fn take(&mut self, key: Key) -> Option<Json> {
        let at = self.0.iter().position(|(k, _)| *k == key)?;
        Some(self.0.swap_remove(at).1)
    }

    pub(crate) fn text(&self, key: Key) -> Option<&str> {
        self.get(key)?.text()
    }

    /// Sets the value of a key. The last of several values wins.
    fn set(&mut self, key: Key, value: Json) {
        match self.0.iter_mut().find(|(k, _)| *k == key) {
            Some(entry) => entry.1 = value,
            None => self.0.push((key, value)),
        }
    }
}

/// The deserializer of a value at a nesting level.
#[derive(Clone, Copy)]
struct Part<'a> {
    level: usize,
    too_deep: &'a Cell<bool>,
}

impl Part<'_> {
    fn deeper<E: serde::de::Error>(self) -> Result<Self, E> {
        if self.level >= MAX_SCHEMA_JSON_LEVELS {
            self.too_deep.set(true);
            return Err(E::custom("nested too deep"));
        }
        Ok(Part {
            level: self.level + 1,
            ..self
        })
    }
}

impl<'de> DeserializeSeed<'de> for Part<'_> {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Part<'_> {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(Json::Number(number))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Json, E> {
        Ok(Json::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Json, E> {
        Ok(Json::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Json, E> {
        Ok(Json::Other)
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Json, A::Error> {
        let within = self.deeper()?;
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(within)? {
            values.push(value);
        }
        Ok(Json::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let within = self.deeper()?;
        let mut object = Object::default();
        while let Some(key) = map.next_key_seed(KeyOnly)? {
            match key {
                Some(Key::Default) => {
                    let text: Box<RawValue> = map.next_value()?;
                    object.set(Key::Default, Json::Default(text.get().into()));
                }
                Some(key) => object.set(key, map.next_value_seed(within)?),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        // An empty object would take much more memory than its text, and a schema may contain many of them.
        Ok(if object.0.is_empty() {
            Json::Other
        } else {
            Json::Object(object)
        })
    }
}

/// The deserializer of a key, which returns `None` if reading doesn't need the key's value.
struct KeyOnly;

impl<'de> DeserializeSeed<'de> for KeyOnly {
    type Value = Option<Key>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<Key>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyOnly {
    type Value = Option<Key>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, text: &str) -> Result<Option<Key>, E> {
        Ok(Key::of(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_that_reading_needs_are_kept() {
        let bare = r#"{"type": "record", "name": "R", "fields": [{"name": "a", "type": ["null", {"type": "fixed",
            "name": "F", "size": 3, "logicalType": "decimal", "precision": 2}]}]}"#;
        let adorned = r#"{"doc": [[{}], -1.5e3], "type": "map", "type": "record", "name": "R",
            "fields": [{"name": "a", "order": true, "type": ["null", {"type": "fixed",
            "name": "F", "connect.name": null, "size": 3, "logicalType": "decimal", "precision": 2}]}]}"#;
        assert_eq!(Json::parse(bare).unwrap(), Json::parse(adorned).unwrap());
    }

    #[test]
    fn defaults_are_kept_as_text() {
        let Json::Object(object) = Json::parse(r#"{"default": {"type": [1, null]}, "aliases": ["x"]}"#).unwrap() else {
            panic!("no object")
        };
        assert_eq!(
            object.get(Key::Default),
            Some(&Json::Default(r#"{"type": [1, null]}"#.into()))
        );
        assert_eq!(
            object.get(Key::Aliases),
            Some(&Json::List(vec![Json::Text("x".into())]))
        );
    }

    #[test]
    fn nesting_is_bounded_only_if_it_matters() {
        let kind = |json: String| Json::parse(&json).err().map(|e| e.kind());
        let nested = |n: usize| "[".repeat(n) + &"]".repeat(n);
        assert_eq!(kind(nested(MAX_SCHEMA_JSON_LEVELS)), None);
        assert_eq!(kind(nested(MAX_SCHEMA_JSON_LEVELS + 1)), Some(ErrorKind::Limit));
        assert_eq!(kind("[".repeat(1 << 20)), Some(ErrorKind::Limit));
        assert_eq!(kind("{\"type\":".repeat(1 << 20)), Some(ErrorKind::Limit));
        // Skipped values may be nested to any depth.
        assert_eq!(kind(format!("{{\"default\": {}}}", nested(1 << 20))), None);
        assert_eq!(
            kind(format!("{{\"default\": {}}}", "[".repeat(1 << 20))),
            Some(ErrorKind::Schema)
        );
    }
}
