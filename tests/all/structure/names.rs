//! The names in a file's items.

use proc_macro2::{TokenStream, TokenTree};
use syn::{Attribute, Item, UseTree};

/// Names joined by `::`.
pub type Path = Vec<String>;

/// Returns whether an item exists in tests alone.
pub fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let mut found = false;
        if attribute.path().is_ident("cfg") {
            // Any cfg that asks for tests begins with it in this workspace: `test`, `all(test, …)`, `fuzzing`.
            let _ = attribute.parse_nested_meta(|meta| {
                found |= meta.path.is_ident("test") || meta.path.is_ident("fuzzing");
                if meta.path.is_ident("all") {
                    meta.parse_nested_meta(|inner| {
                        found |= inner.path.is_ident("test");
                        skip_value(&inner)
                    })?;
                }
                skip_value(&meta)
            });
        }
        found
    })
}

/// Returns the file that `#[path = "…"]` names for a module.
pub fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    let path = attributes
        .iter()
        .find(|attribute| attribute.path().is_ident("path"))?;
    match &path.meta.require_name_value().ok()?.value {
        syn::Expr::Lit(literal) => match &literal.lit {
            syn::Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

/// Skips `= value` and `(…)` behind a name.
fn skip_value(meta: &syn::meta::ParseNestedMeta<'_>) -> syn::Result<()> {
    if meta.input.peek(syn::Token![=]) {
        meta.value()?.parse::<syn::Lit>()?;
    } else if meta.input.peek(syn::token::Paren) {
        meta.input.parse::<proc_macro2::Group>()?;
    }
    Ok(())
}

/// Returns the attributes of an item, and the name that it defines, if any.
pub fn of_item(item: &Item) -> (&[Attribute], Option<String>) {
    macro_rules! named {
        ($($kind:ident),*) => {
            match item {
                $(Item::$kind(item) => (&item.attrs[..], Some(item.ident.to_string())),)*
                Item::Fn(item) => (&item.attrs[..], Some(item.sig.ident.to_string())),
                Item::Macro(item) => (&item.attrs[..], item.ident.as_ref().map(ToString::to_string)),
                Item::Impl(item) => (&item.attrs[..], None),
                Item::Use(item) => (&item.attrs[..], None),
                _ => (&[][..], None),
            }
        };
    }
    named!(Const, Enum, Mod, Static, Struct, Trait, Type, Union)
}

/// An import by a `use`.
pub enum Import {
    /// A path under a name.
    Named(String, Path),
    /// Everything in a module.
    All(Path),
}

/// Appends the imports of `tree` below `prefix`.
pub fn imports(prefix: &Path, tree: &UseTree, all: &mut Vec<Import>) {
    let joined = |name: &syn::Ident| {
        let mut path = prefix.clone();
        if name != "self" {
            path.push(name.to_string());
        }
        path
    };
    match tree {
        UseTree::Path(path) => imports(&joined(&path.ident), &path.tree, all),
        UseTree::Name(name) => {
            let path = joined(&name.ident);
            all.extend(path.last().cloned().map(|name| Import::Named(name, path)));
        }
        UseTree::Rename(name) => {
            all.push(Import::Named(name.rename.to_string(), joined(&name.ident)));
        }
        UseTree::Glob(_) => all.push(Import::All(prefix.clone())),
        UseTree::Group(group) => {
            for tree in &group.items {
                imports(prefix, tree, all);
            }
        }
    }
}

/// Appends the paths in `tokens`, those in macros' arguments too; names of fields and methods are none.
pub fn paths(tokens: TokenStream, all: &mut Vec<Path>) {
    let mut path = Path::new();
    let mut before = String::new(); // the punctuation since the last name
    for token in tokens {
        match token {
            TokenTree::Ident(name) => {
                if before != "::" {
                    all.extend((!path.is_empty()).then(|| std::mem::take(&mut path)));
                }
                if before != "." {
                    path.push(name.to_string());
                }
                before.clear();
            }
            TokenTree::Punct(punct) => before.push(punct.as_char()),
            TokenTree::Group(group) => {
                all.extend((!path.is_empty()).then(|| std::mem::take(&mut path)));
                before.clear();
                paths(group.stream(), all);
            }
            TokenTree::Literal(_) => before.clear(),
        }
    }
    all.extend((!path.is_empty()).then_some(path));
}
