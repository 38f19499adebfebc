//! A crate's modules, and the items of other files that each file names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use quote::ToTokens;
use syn::Item;

use super::names::{self, Import};

/// The deepest chain of re-exports that is followed.
const DEEPEST: usize = 20;

/// One module.
#[derive(Default)]
struct Module {
    file: usize,
    parent: usize,
    children: BTreeMap<String, usize>,
    defined: BTreeSet<String>,
    imported: BTreeMap<String, names::Path>,
    all_of: Vec<names::Path>,
    named: Vec<names::Path>,
}

/// The target of a path.
#[derive(Clone, Copy)]
enum Target {
    Module(usize),
    /// The file that defines an item.
    Item(usize),
}

/// A crate's modules, the first of which is its root.
#[derive(Default)]
pub struct Modules {
    root: PathBuf,
    files: Vec<String>,
    modules: Vec<Module>,
}

impl Modules {
    /// Reads the crate with the root file `file`, a path below `root`.
    pub fn read(root: &Path, file: &str) -> std::io::Result<Self> {
        let mut all = Self {
            root: root.to_path_buf(),
            ..Self::default()
        };
        let folder = Path::new(file).parent().unwrap_or(Path::new(""));
        all.read_file(Path::new(file), folder, 0)?;
        Ok(all)
    }

    /// Returns a file's path.
    pub fn file(&self, file: usize) -> &str {
        &self.files[file]
    }

    fn read_file(&mut self, file: &Path, folder: &Path, parent: usize) -> std::io::Result<usize> {
        let text = std::fs::read_to_string(self.root.join(file))?;
        let parsed = syn::parse_file(&text).map_err(std::io::Error::other)?;
        self.files.push(file.display().to_string());
        self.read_module(self.files.len() - 1, parsed.items, folder, parent)
    }

    fn read_module(
        &mut self,
        file: usize,
        items: Vec<Item>,
        folder: &Path,
        parent: usize,
    ) -> std::io::Result<usize> {
        let this = self.modules.len();
        self.modules.push(Module {
            file,
            parent,
            ..Module::default()
        });
        for item in items {
            let (attributes, name) = names::of_item(&item);
            if names::is_for_tests(attributes) {
                continue;
            }
            match item {
                Item::Mod(module) => {
                    let name = module.ident.to_string();
                    let inner = folder.join(&name);
                    let child = match (module.content, names::path_attribute(&module.attrs)) {
                        (Some((_, items)), _) => self.read_module(file, items, &inner, this)?,
                        (None, Some(path)) => self.read_file(&folder.join(path), &inner, this)?,
                        (None, None) => self.read_child(&inner, this)?,
                    };
                    self.modules[this].children.insert(name, child);
                }
                Item::Use(item) => self.import(this, &item),
                other => {
                    self.modules[this].defined.extend(name);
                    names::paths(other.into_token_stream(), &mut self.modules[this].named);
                }
            }
        }
        Ok(this)
    }

    fn read_child(&mut self, folder: &Path, parent: usize) -> std::io::Result<usize> {
        let beside = folder.with_extension("rs");
        match self.root.join(&beside).exists() {
            true => self.read_file(&beside, folder, parent),
            false => self.read_file(&folder.join("mod.rs"), folder, parent),
        }
    }

    fn import(&mut self, module: usize, item: &syn::ItemUse) {
        let mut all = Vec::new();
        names::imports(&Vec::new(), &item.tree, &mut all);
        for import in all {
            match import {
                Import::Named(name, path) => {
                    self.modules[module].imported.insert(name, path);
                }
                Import::All(path) => self.modules[module].all_of.push(path),
            }
        }
    }

    /// Returns, for each pair of files, the items of the second that the first names.
    pub fn uses(&self) -> BTreeMap<(usize, usize), BTreeSet<String>> {
        let mut uses: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for (module, named) in self.modules.iter().enumerate() {
            for path in &named.named {
                // In `Type::NEW` the type counts.
                let first = (1..=path.len()).find_map(|len| {
                    match self.resolve(module, &path[..len], 0)? {
                        Target::Item(file) => Some((file, path[..len].join("::"))),
                        Target::Module(_) => None,
                    }
                });
                if let Some((file, name)) = first.filter(|(file, _)| *file != named.file) {
                    uses.entry((named.file, file)).or_default().insert(name);
                }
            }
        }
        uses
    }

    fn resolve(&self, module: usize, path: &[String], depth: usize) -> Option<Target> {
        let mut at = Target::Module(module);
        for name in path {
            let Target::Module(module) = at else {
                return Some(at);
            };
            at = match name.as_str() {
                "crate" => Target::Module(0),
                "self" => at,
                "super" => Target::Module(self.modules[module].parent),
                name => self.find(module, name, depth + 1)?,
            };
        }
        Some(at)
    }

    /// Finds a name that a module defines, imports or re-exports.
    fn find(&self, module: usize, name: &str, depth: usize) -> Option<Target> {
        if depth > DEEPEST {
            return None;
        }
        let this = &self.modules[module];
        if let Some(&child) = this.children.get(name) {
            return Some(Target::Module(child));
        }
        if this.defined.contains(name) {
            return Some(Target::Item(this.file));
        }
        if let Some(path) = this.imported.get(name) {
            return self.resolve(module, path, depth);
        }
        this.all_of
            .iter()
            .find_map(|path| match self.resolve(module, path, depth)? {
                Target::Module(other) if other != module => self.find(other, name, depth + 1),
                _ => None,
            })
    }
}
